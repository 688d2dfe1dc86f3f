"""One short file a model family. `registry` finds the class of an architecture."""
