-- Remembers a reservation that a fast path has decided, and replies with 2, the reply of the fast
-- path, and the state of the hold: see hold.fast.lua. decide.lua includes this file.
-- inputs
-- luacheck: read globals all_argv cost expiry_shift from held_key held_mode held_ttl limit now
-- luacheck: read globals pack replied try unpack_struct window
-- outputs
-- luacheck: globals argv kind reply slow to
-- luacheck: no unused

if held_key then
  argv, to = all_argv, from + 1
  if slow then
    kind, slow = 0, from
  else
    local granted, remaining = unpack_struct('<dd', reply[replied])
    local status, rest = 0, 0
    if granted == 1 then
      local ends, refund_at, is_settled = now + held_ttl, now, held_mode == 2
      if kind > 5 then
        -- When the units before it have drained.
        local level, part = unpack_struct('<dd', reply[replied], 17)
        local parts = level * window + part
        refund_at = now + (parts + -parts % limit) / limit
      end
      local record = pack('<BBddddd', 104, is_settled and 2 or 0, cost, is_settled and ends or now,
        refund_at, is_settled and cost or ends, remaining - cost)
      try('SET', held_key, record, 'PXAT',
        math.floor((ends + (is_settled and 0 or 60000000) + expiry_shift) / 1000) + 1)
      status, rest = 1, is_settled and 0 or held_ttl
    end
    reply[replied] = pack('<d', 2) .. reply[replied] .. pack('<dd', status, rest)
  end
end
