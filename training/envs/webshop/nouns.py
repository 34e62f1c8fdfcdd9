"""Nouns of a product's title, by a tagger that needs no download."""

from __future__ import annotations

import re
from functools import lru_cache

_TOKEN = re.compile(r"[^\W\d_]+(?:[-'’&][^\W\d_]+)*|\d+(?:[.,]\d+)*|[^\w\s]")
_OWNER = re.compile(r"['’]s$", re.IGNORECASE)


@lru_cache(maxsize=4096)
def nouns(title: str) -> frozenset[str]:
    """The nouns and names among the words of a title, lower-case.

    Source: WebShop, which takes the nouns and proper nouns of spaCy's English model. Departures: that model cannot be
    installed offline; ours are the NN* tags of TextBlob's PatternTagger (a lexicon and Brill's rules, shipped with the
    package). Both take a capitalised word that they do not know for a name.
    """
    from textblob.en import tag  # 3 s to import, and only a purchase needs it

    words = [_OWNER.sub("", word) for word in _TOKEN.findall(title)]
    tagged = tag(" ".join(words), tokenize=False)
    return frozenset(word.lower() for word, kind in tagged if kind.startswith("NN") and word[:1].isalpha())
