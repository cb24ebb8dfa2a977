"""The PEFT methods, a folder each: `configs.py` lists their settings, `registry.py` loads them."""
