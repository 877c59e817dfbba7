"""Commands arrive as they were given."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from modelmill.runtime.batch_layout import BatchLayout
from modelmill.runtime.step_commands import COMMANDS, HEADER_BYTES, StepCommand

count = st.integers(0, 1 << 40)
layouts = st.builds(BatchLayout, count, count, count, count)
commands = st.builds(
    StepCommand,
    st.sampled_from(COMMANDS),
    count,
    layouts,
    st.booleans(),
    count,
    count,
    st.booleans(),
    count,
    count,
    count,
)


@given(command=commands)
def test_orders_survive_the_way(command: StepCommand) -> None:
    header = command.pack()
    assert len(header) == HEADER_BYTES
    assert StepCommand.unpack(header) == command
