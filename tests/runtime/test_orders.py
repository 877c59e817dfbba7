"""Orders arrive as they were given."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from modelmill.runtime.layout import Layout
from modelmill.runtime.orders import HEADER, KINDS, Order

count = st.integers(0, 1 << 40)
layouts = st.builds(Layout, count, count, count, count)
orders = st.builds(
    Order, st.sampled_from(KINDS), count, layouts, st.booleans(), count, count, st.booleans(), count, count, count
)


@given(order=orders)
def test_orders_survive_the_way(order: Order) -> None:
    header = order.pack()
    assert len(header) == HEADER
    assert Order.unpack(header) == order
