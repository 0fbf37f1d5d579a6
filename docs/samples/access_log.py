#!/usr/bin/env python3
"""Writes the access log of one day of a small shop, in the combined format: visitors, an office
behind one address, crawlers, the health checks of a balancer, and one client that copies the
catalogue. The same bytes on every machine: random numbers come from a generator of its own."""

import sys

START = 20 * 3600  # seconds; the day wraps, so that the log begins at midnight
BROWSER = "Mozilla/5.0 (X11; Linux x86_64; rv:145.0) Gecko/20100101 Firefox/145.0"
GOOGLE = "Mozilla/5.0 (compatible; Googlebot/2.1; +http://www.google.com/bot.html)"
BING = "Mozilla/5.0 (compatible; bingbot/2.0; +http://www.bing.com/bingbot.htm)"
state = 7
lines = []


def below(limit):
    """Returns a number from 0 up to, but not including, the limit."""
    global state
    state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
    return (state >> 33) % limit


def add(second, address, target, agent=BROWSER, status=200):
    lines.append((second % 86400, len(lines), address, target, agent, status))


def visit(address, second, pages):
    """A visitor reads pages, whose pictures are fetched at once, and searches sometimes."""
    for _ in range(pages):
        item = below(400)
        add(second, address, f"/items/{item}")
        for picture in range(2 + below(6)):
            add(second + below(2), address, f"/static/{item}-{picture}.jpg")
        if below(3) == 0:
            add(second + 5, address, f"/api/search?q=word{below(50)}")
        if below(12) == 0:
            add(second + 9, address, "/api/orders", status=201)
        second += 10 + below(90)


for number in range(420):
    address = f"203.0.113.{number % 250}" if number < 250 else f"198.51.100.{number - 250}"
    for _ in range(1 + below(3)):
        visit(address, START + below(57600), 1 + below(9))
for _ in range(40):  # an office: many people, one address
    visit("192.0.2.44", START + 43200 + below(28800), 1 + below(6))
for step in range(2400):  # the copy of the catalogue: about two requests per second
    add(START + 50000 + step // 2, "192.0.2.200", f"/api/items/{step}", "python-requests/2.32")
for step in range(500):
    add(START + step * 170, "192.0.2.10", f"/items/{below(400)}", GOOGLE)
for step in range(250):
    add(START + step * 300, "192.0.2.11", f"/items/{below(400)}", BING)
for second in range(0, 86400, 60):
    add(second, "10.0.0.2", "/healthz", "kube-probe/1.34")

for second, _, address, target, agent, status in sorted(lines):
    time = f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"
    sys.stdout.write(
        f'{address} - - [16/Nov/2026:{time} +0000] "GET {target} HTTP/1.1" {status} 512 "-" '
        f'"{agent}"\n'
    )
