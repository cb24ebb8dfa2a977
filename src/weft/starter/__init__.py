"""Processes that need not import anything: one imports for all, and forks.

`start_process` starts one, `begin` has the first prepared. `multiprocessing` has such a server too, but its children
import the program that started them: one without `if __name__ == "__main__"` would run once more in each of them.
"""

from weft.starter.child_process import ChildProcess
from weft.starter.order import ProcessOrder
from weft.starter.starter import begin, start_process

__all__ = ["ChildProcess", "ProcessOrder", "begin", "start_process"]
