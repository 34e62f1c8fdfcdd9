"""Skills: privileged text, retrieved from a library or written from a finished trajectory."""
