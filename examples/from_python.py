"""Trains two adapters from Python, follows what happens, and adds a third while they train.

python examples/from_python.py
"""

from __future__ import annotations

from pathlib import Path

import weft

DATA = Path(__file__).parent / "data"


def main() -> None:
    """Prints a line for every step, and where the adapters are at the end."""
    engine = weft.Engine("tiny", capacity=512)
    engine.keep_in("runs/from_python")
    settings = {"max_steps": 4, "global_batch_size": 4, "max_length": 128}
    engine.submit(weft.Job("support", (str(DATA / "support.jsonl"),), **settings))
    engine.submit(weft.Job("shout", (str(DATA / "shout.jsonl"),), adapter=weft.Adapter(r=4), **settings))
    for event in engine.events():
        if isinstance(event, weft.StepDone):
            print(f"{event.job}: step {event.step} of {event.num_steps}, loss {event.loss:.3f}")
            if event.job == "shout" and event.step == 2:
                # Jobs come and go while others train; no other adapter changes by a bit.
                engine.submit(weft.Job("late", (str(DATA / "titles.csv"),), **settings))
        elif isinstance(event, weft.JobSucceeded):
            print(f"{event.job}: {event.adapter_dir}")


if __name__ == "__main__":
    main()
