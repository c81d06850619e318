"""Jobs on a Ray cluster: `paceline.ray.run` from your own script, `--engine ray` on the command line.

outcome = paceline.ray.run(["train.py", "--lr", "1e-3"], ranks=4)
print(outcome.exit_code, outcome.failure)
"""

from paceline.ray.run import run

__all__ = ["run"]
