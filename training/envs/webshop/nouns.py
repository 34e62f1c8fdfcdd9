"""Nouns of a product's title, by a lexicon that a package ships."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

_WORD = re.compile(r"[^\W\d_]+(?:[-'’&][^\W\d_]+)*")
_OWNER = re.compile(r"['’]s$", re.IGNORECASE)


@lru_cache(maxsize=4096)
def nouns(title: str) -> tuple[str, ...]:
    """The nouns and names among the words of a title, lower-case, in their order and each as often as it stands there.

    A word counts if its tag in the lexicon, as it is written or else in lower case, is one of the noun tags (NN*),
    or if the lexicon does not know it.
    Source: WebShop, which takes the nouns and proper nouns of spaCy's English model. Departures: that model cannot be
    installed offline; ours is Brill's lexicon (Brown corpus, Penn Treebank) as TextBlob ships it, without the tagger's
    rules for the context of a word. Both take a capitalised word that they do not know for a name.
    """
    tags = lexicon()
    words = (_OWNER.sub("", word) for word in _WORD.findall(title))
    return tuple(w.lower() for w in words if (tags.get(w) or tags.get(w.lower(), "NN")).startswith("NN"))


@lru_cache(maxsize=1)
def lexicon() -> dict[str, str]:
    """Word -> its most frequent tag. The package is not imported for it: that takes 200 MB and some seconds.

    Raises: ValueError when the package is not installed.
    """
    spec = find_spec("textblob")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("the lexicon of the package textblob is missing; `make setup` installs it")
    path = Path(spec.submodule_search_locations[0], "en", "en-lexicon.txt")
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split(" ", 1) for line in lines if " " in line and not line.startswith(";;;"))
