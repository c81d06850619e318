"""Fault injection, to rehearse what a job does in a real failure.

    paceline run -n 4 --max-restarts 1 --fault "kill rank=1 step=20" train.py

    paceline.faults.arm("sleep rank=0 step=5 where=forward seconds=30")    # the same from inside a script

A fault happens when a rank notes its progress, so it works in every script that uses paceline's class and needs no code
in the script.
"""

from paceline.faults.armed import InjectedFault, arm, disarm
from paceline.faults.fault import KINDS, Fault, parse, parse_all

__all__ = ["KINDS", "Fault", "InjectedFault", "arm", "disarm", "parse", "parse_all"]
