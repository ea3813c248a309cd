"""What a plain training never imports: the core names it in EXTRAS (options/registry.py), no more."""
