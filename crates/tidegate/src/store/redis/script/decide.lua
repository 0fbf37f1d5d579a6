-- Decides one or more independent requests in one call, at one time.
--
-- KEYS   the keys of the requests, in their order
-- ARGV   first one packed header for each run of equal requests, then, if the script may cross
--        slots, the keys that are not in KEYS. A header is ten doubles:
--          deadline   in microseconds of the server's time: a later call does nothing, because its
--                     caller has timed out. In the variant for servers that refuse TIME in
--                     scripts: the time of the call, as the client estimates it
--          time       in microseconds for tests; 0 in production, which uses the server's time
--          runs       number of headers
--          kind       1 sliding-log, 2 the same packed, 3 sliding-counter, 4 the same packed,
--                     5 fixed-window, 6 token-bucket, 7 leaky-bucket; 0 for a group, see below
--          count      number of keys of this run
--          limit, window (microseconds), option (burst of a bucket; 1 for a log that counts
--                     denied requests; for a calendar quota see calendar.lua; else 0), cost
--          times      number of equal acquires of each key; 0 for a peek
--        The header of kind 1 or 3, which are readable, also has the window as text, such as 60s.
--        The first header is valid for the call in its first three numbers.
--        A group is one request of any action on any charges. Its header has, instead of limit
--        and window, the action and the number of charges, and continues with six doubles per
--        charge: kind, limit, window, option, cost, since; kind 8 is concurrency. Instead of the
--        option it has the number of charges with a block, whose keys follow those of the counts,
--        and instead of the cost that of charges with a hold, whose keys follow those of blocks.
--        After all charges come seven doubles per hold: number of the charge, mode (0 without an
--        id, 1 reserve, 2 settled at once), ttl, max_ttl, ttl of the policy (microseconds), number
--        of keys of a record, set (0 none, 1 one whose ended holds release their units, 2 one that
--        is there if the policy did so before); then, per block: number of the charge, number of
--        lengths, lengths (microseconds). `times` is 1 for a group of one charge that hold.fast.lua
--        may decide; its header ends with the window as text.
--          action   1 acquire, 2 peek, 3 refund, 4 reset, 5 charge-up-to, 6 report: charges even
--                   beyond the limit, each charge separately, 7 count-denied: an acquire that
--                   another node has already denied; spends nothing; 8 commit, 9 renew
--          since    for a refund: time of the original charge (microseconds of the server, or a
--                   little earlier; 0: unknown; negative: its age in microseconds)
-- reply  one string of doubles: the server's time in microseconds, and if the deadline has not
--        passed, for each key of a run: number of grants, units that remained before, the
--        algorithm's snapshot (from which the client computes each decision), and if some were
--        denied: their retry_after, reset_after (microseconds)
--        for each charge of a group: allowed (1|0), remaining, retry_after, reset_after, delay;
--        for a reset just 1; for a charge whose hold has a record also its status (0 none, 1 held,
--        2 repeated, 3 settled, 4 ended, 5 unknown, 6 the same again) and the time until its end. A
--        group with `times` 1 has 2 before it, or the reply of a run: it is held if it is granted.
--        A request that fails has instead: -1, the length of the error's text, and the text. The
--        client knows which errors do not concern the key, such as OOM.
--        The text is that of Redis, or "damaged value: …" if the script cannot compute with what
--        is stored. LATER means that the call has done enough, and nothing for this request, which
--        is to be sent again.
--
-- For example, one unit of 100 per minute for one key:
--   EVALSHA <sha> 1 rate_limit:{user123}:per-user <the header
--     1700000000100000, 0, 1, 1, 1, 100, 60000000, 0, 1, 1 as doubles>
--   -> 1700000000000250, 1, 100 as doubles
--
-- `include` is replaced by the text of a file, which is a chunk in the scope of its includer: its
-- head names the variables that it reads, and those that it sets or changes. A function that is
-- called instead would be created in each call of the script.
--
-- The fast path of an algorithm decides a run, one charge per key: it adds a reply for each of the
-- keys `from` to `to`, or returns that of a single key. At a key whose count is in an unusual
-- state, it stops and sets `slow` to the number of the key. general.lua decides that key, and any
-- group, and its functions are only created then. A call of redis.call is what a decision costs,
-- and a function that is created, a number that is printed or an argument more is nearly as much.
--
-- An acquire of several charges is all or nothing: all are read and checked, then all are written,
-- or none. A fast path leaves products from 2^52 on to general.lua, because they may not be exact;
-- see arithmetic.lua. As text a number needs string.format, because `..` keeps only 14 digits.
--
-- A stored value may hold anything. A fast path checks what it computes with, before it writes.
-- luacheck: globals clock expiry_shift now server_time
-- luacheck: no unused

local keys, argv, try, pack, unpack_struct =
  KEYS, ARGV, redis.pcall, struct.pack, struct.unpack
local deadline, time, runs, kind, count, limit, window, option, cost, times =
  unpack_struct('<dddddddddd', argv[1])

include('clock.lua')
if server_time > deadline then return pack('<d', server_time) end
-- Packed numbers. The fast path of a single key returns them at once, without this table.
local is_single, reply, replied =
  runs == 1 and (count == 1 or kind == 0 and times == 1), nil, 1
if not is_single then reply = {pack('<d', server_time)} end
-- A test's clock may stop while the server's goes on, so keys expire an hour later.
if time > 0 then now, expiry_shift = time, server_time - time + 3600000000 end

if argv[runs + 1] then
  keys = {unpack(argv, runs)}
  keys[1] = KEYS[1]
end

-- Remaining budget of this call for the removal of expired members of sorted sets, each of which
-- takes up to a microsecond. Beyond it, each write removes four: more than it adds.
local removals = 250
-- Number of resets in this call: holds that follow one are a microsecond younger than it.
local resets = 0
-- The current run, its next key and its last; functions of general.lua, once they are created.
local run, from, to, decide_slow, decide_group = 1, 1, count, nil, nil
while true do
  include('hold.fast.lua')
  include('calendar.lua')
  -- `slow`: a key that is left to general.lua. `spends`: not a peek. `total`: units to spend.
  local slow, spends = nil, times > 0
  if not spends then times = 1 end
  local total = cost * times
  if kind == 1 or kind == 3 then
    -- The numbers of readable counts are text, and to check all digits costs more than an error
    -- that is raised. The function returns `slow` or the reply of a single key, and the rest of the
    -- budget. All that it uses is a parameter: a variable of the script would be moved to the heap.
    local done, found, left = pcall(function(keys, header, from, to, kind, limit, window, total,
      cost, times, spends, now, time, clock, server_time, expiry_shift, is_single, reply, replied,
      removals, try, pack)
      local slow, unpack_struct = nil, nil
      if kind == 1 then
        include('sliding_log.fast.lua')
      else
        include('sliding_counter.fast.lua')
      end
      return slow, removals
    end, keys, argv[run], from, to, kind, limit, window, total, cost, times, spends, now, time,
      clock, server_time, expiry_shift, is_single, reply, replied, removals, try, pack)
    if not done then
      -- An error of a command is one of the call, because something may be written.
      if type(found) == 'table' or string.sub(found, 1, 1) == '@' then error(found, 0) end
      slow = is_single and from or from + #reply - replied
    elseif is_single and found ~= from then
      return found
    else
      slow, removals = found, left
    end
    if not is_single then replied = #reply end
  elseif kind == 2 then
    include('sliding_log_packed.fast.lua')
  elseif kind == 4 then
    local header = nil
    include('sliding_counter.fast.lua')
  elseif kind == 5 then
    include('fixed_window.fast.lua')
  elseif kind > 5 then
    include('bucket.fast.lua')
  else
    slow = from
  end
  include('hold.after.lua')

  if slow then
    if not decide_slow then
      reply = reply or {pack('<d', server_time)}
      include('general.lua')
    end
    if kind == 0 then
      decide_group(argv[run], from, to)
      from = to + 1
    else
      decide_slow(slow, spends)
      from = slow + 1
    end
    if not spends then times = 0 end
  else
    from = to + 1
  end
  if from > to then
    run = run + 1
    if run > runs then break end
    local _
    _, _, _, kind, count, limit, window, option, cost, times =
      unpack_struct('<dddddddddd', argv[run])
    to = to + count
  end
end
return table.concat(reply)
