"""One file per method; the folder is scanned, nothing registers itself."""
