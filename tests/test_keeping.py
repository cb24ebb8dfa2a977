"""A command that starts does not look for garbage, and does afterwards."""

import gc
import subprocess
import sys

from weft.keeping import keeping_all


def test_keeping_all_when_it_ends_then_garbage_is_looked_for_but_not_among_what_was_loaded():
    before = gc.get_freeze_count()
    try:
        with keeping_all():
            assert not gc.isenabled()
            loaded = [[] for _ in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() - before > len(loaded)
    finally:
        gc.unfreeze()


def test_keeping_all_when_triton_was_imported_then_the_process_ends_in_silence():
    """Its bindings speak up over whatever is left at the end."""
    code = "from weft.keeping import keeping_all\nwith keeping_all():\n    import triton.language"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
