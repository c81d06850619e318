"""The measurements that both command lines, `paceline bench` and `python -m paceline.bench`, offer."""

from paceline.bench import allreduce, machinery, series, step_report

COMMANDS = {
    command.name: command
    for command in (step_report.COMMAND, allreduce.COMMAND, series.ACCUMULATE, series.RANKS, machinery.COMMAND)
}
# Studies of our own machinery, which are scripts of the repository.
MOVED = {
    name: f"{name} is a script of the repository now: python benchmarks/{script}"
    for name, script in {
        "cost-model": "cost_model.py",
        "lanes": "lanes_cost.py",
        "agreement": "agreement_cost.py",
        "hooks": "hooks_cost.py",
    }.items()
}
