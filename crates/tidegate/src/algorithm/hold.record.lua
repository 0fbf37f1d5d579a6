-- Remembers a reservation, right before a fast path writes its count: the id must have no record.
-- A fast path includes this file.
-- inputs
-- luacheck: read globals cost expiry_shift i keys level limit mode now pack part remaining resets
-- luacheck: read globals try ttl window
-- outputs
-- luacheck: globals recorded slow
-- luacheck: no unused

if mode then
  local ends, parts = now + ttl, level * window + part
  -- When the units before it have drained.
  local refund_at = parts == 0 and now or now + (parts + -parts % limit) / limit
  -- SETTLED with its end and the units that were used, or OPEN with its time and its end.
  local state, time, end_or_used, known_until = 0, now, ends, ends + 60000000
  if mode == 2 then state, time, end_or_used, known_until = 2, ends, cost, ends end
  local rest, since = remaining - cost, now + resets
  local record = pack('<BBdddddd', 104, state, cost, time, refund_at, end_or_used, rest, since)
  recorded = parts < 4503599627370496 and try('SET', keys[i + 1], record, 'NX', 'PXAT',
    string.format('%d', math.floor((known_until + expiry_shift) / 1000) + 1))
  if not recorded or recorded.err then recorded, slow = nil, i end
end
