"""Dates of all years, against Python's where it has them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from headwater.capture.mongodb.texts import dates

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MOMENTS = st.datetimes(timezones=st.just(UTC)).map(
    lambda m: (m - EPOCH) // timedelta(milliseconds=1)
)


@given(MOMENTS)
def test_a_date_is_that_of_python(milliseconds: int) -> None:
    moment = (EPOCH + timedelta(milliseconds=milliseconds)).replace(tzinfo=None)
    assert datetime.fromisoformat(dates.timestamp_text(milliseconds)) == moment
    assert dates.date_text(milliseconds) == moment.date().isoformat()


def test_years_that_python_lacks() -> None:
    assert dates.timestamp_text(dates.FIRST) == "4714-11-24 00:00:00 BC"
    assert dates.timestamp_text(dates.END - 1) == "294276-12-31 23:59:59.999"
    assert not dates.fits(dates.FIRST - 1)
    assert not dates.fits(dates.END)
