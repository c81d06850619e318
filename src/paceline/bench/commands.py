"""The measurements that both command lines, `paceline bench` and `python -m paceline.bench`, offer."""

from paceline.bench import allreduce, machinery, series, step_report

COMMANDS = {
    command.name: command
    for command in (step_report.COMMAND, allreduce.COMMAND, series.ACCUMULATE, series.RANKS, machinery.COMMAND)
}
