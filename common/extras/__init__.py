"""What a plain training never imports; of these the core knows what EXTRAS names (options/registry.py)."""
