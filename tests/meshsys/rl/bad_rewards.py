"""Rewards that go wrong in every way, as the response says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

_KEPT: list[bytearray] = []


def obey(prompt, response: str):
    """The length of the response, unless it is an order."""
    match response.partition(" "):
        case "raise", _, message:
            raise ValueError(message)
        case "hang", _, _:
            while True:
                pass
        case "sleep", _, seconds:
            time.sleep(float(seconds))
            return 1.0
        case "wait", _, path:
            while not os.path.exists(path):
                time.sleep(0.01)
            return 1.0
        case "exit", _, status:
            os._exit(int(status))
        case "sys_exit", _, _:
            sys.exit(3)
        case "kill", _, _:
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault", _, _:
            os.kill(os.getpid(), signal.SIGSEGV)
        case "deaf", _, _:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        case "child", _, path:
            child = subprocess.Popen(["sleep", "600"])
            with open(path, "w") as file:
                file.write(str(child.pid))
            time.sleep(600)
        case "nan", _, _:
            return float("nan")
        case "text", _, _:
            return "0.5"
        case "nothing", _, _:
            return None
        case "huge", _, _:
            return 10**400
        case "print", _, _:
            print("garbage " * 10_000)
            os.write(1, b"\xff\x00" * 10_000)
            return 2.0
        case "allocate", _, _:
            return float(len(bytearray(64 * 2**30)))
        case "keep", _, _:
            _KEPT.append(bytearray(2**27))
        case "alarm", _, _:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        case "terminate", _, _:
            os.kill(os.getppid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        case "later", _, seconds:
            threading.Timer(float(seconds), os._exit, [9]).start()
        case "modules", _, _:
            return float("jax" in sys.modules)
        case "random", _, _:
            import random

            return random.random()
    return float(len(response))


def other(prompt, response: str, *, scale: float = 1.0) -> float:
    return scale * len(response) + float(prompt.answer or 0)


NOT_A_FUNCTION = 3
