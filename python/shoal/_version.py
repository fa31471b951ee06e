__version__ = "0.1.0.dev0"  # make release writes the real one
