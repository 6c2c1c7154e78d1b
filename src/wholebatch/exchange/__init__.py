"""Send the rows of Y between ranks, and reduce statistics of these rows to their owners. Knows no loss."""

from .exchange import ColumnData, Exchange, Initial, zeros
from .gather import GatherExchange
from .ring import RingExchange
from .schedule import num_entries
from .select import EXCHANGES, USED_EXCHANGES, ExchangeName, ExchangeUsed, columns_of_a_chunk, select_exchange

__all__ = [
    "EXCHANGES",
    "USED_EXCHANGES",
    "ColumnData",
    "Exchange",
    "ExchangeName",
    "ExchangeUsed",
    "GatherExchange",
    "Initial",
    "RingExchange",
    "columns_of_a_chunk",
    "num_entries",
    "select_exchange",
    "zeros",
]
