"""What a plain training never imports: the core names these in EXTRAS (options/registry.py), and knows no more."""
