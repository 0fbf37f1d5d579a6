"""Computes the periods of calendars by zoneinfo, in the plainest way: the list of all midnights at
which a period starts, and the two around an instant.

Reads lines of "unit zone anchor seconds", and writes "start end" in seconds for each.
"""

import bisect
import calendar
import datetime
import functools
import sys
import zoneinfo

YEARS = range(2005, 2031)
WEEKDAYS = [name.lower() for name in calendar.day_name]


def dates(unit, anchor):
    """Returns the dates on which periods start."""
    if unit in ("day", "week"):
        day = datetime.date(YEARS[0], 1, 1)
        while day.year in YEARS:
            if unit == "day" or day.weekday() == WEEKDAYS.index(anchor):
                yield day
            day += datetime.timedelta(days=1)
        return
    step = {"month": 1, "quarter": 3, "year": 12}[unit]
    for year in YEARS:
        for month in range(1, 13, step):
            days = calendar.monthrange(year, month)[1]
            yield datetime.date(year, month, min(int(anchor), days))


@functools.cache
def starts(unit, zone, anchor):
    """Returns the instants at which periods start, without those of skipped days."""
    zone = zoneinfo.ZoneInfo(zone)
    midnights = (datetime.datetime.combine(date, datetime.time(), zone) for date in dates(unit, anchor))
    return sorted({int(midnight.timestamp()) for midnight in midnights})


for line in sys.stdin:
    unit, zone, anchor, seconds = line.split()
    all_starts = starts(unit, zone, anchor)
    position = bisect.bisect_right(all_starts, int(seconds))
    print(all_starts[position - 1], all_starts[position])
