"""The run-time checker of type hints: beartype, with an int accepted where a float is asked for (PEP 484)."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
