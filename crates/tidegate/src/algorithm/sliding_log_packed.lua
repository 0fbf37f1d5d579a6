-- sliding-log as a string of packed timestamps: the same answers as the sorted set in a fraction of the memory.
--
-- Redis: one of two forms, told apart by their first byte.
-- Short, up to 1024 bytes, as long as every request costs 1: read and written as a whole.
--   "q", the width of a time, the newest time in 8 bytes, then the requests in the order of time
--   a request is its time, in 4, 5 or 6 bytes (enough for the window; the rest of the time follows from the newest)
-- Long:
--   "r" and the rest of a header, then the requests of the open chunk in the order of time, then unused room
--   a request of cost 1 is its time; from the first other cost on, each is its time and the running total of units, in
--   4 more bytes
-- A chunk has 8,192 requests. A full one is sealed: it moves to a key of its own, <prefix>:{<key>}%<number>:<policy>, which
-- expires two windows after its newest request: until then a header may point to it. So no write copies more than a chunk,
-- however long the log is.
-- Requests that have left the window are skipped by `first`. A string that fits into one read is rewritten at each write; a
-- longer one is patched in place, and rewritten, with a little room to grow, when it is full: one copy in some n/32 writes.
-- Searches are binary, so no decision walks the log. It expires when its newest request leaves the window.

local SHORT, LONG = 113, 114 -- "q", "r"
local SHORT_HEADER_SIZE = 10
local FIRST_READ = 1024
local pack, unpack_struct, sub = struct.pack, struct.unpack, string.sub

local function width_for(window)
  return window < 4294967296 and 4 or window < 1099511627776 and 5 or 6
end

-- The long form. Lua creates functions at every call, so these only when they are needed.
local function make_long_form()
  -- The last two: the window that the sealed chunks' expiry is made for; the next chunk to extend, if it is raised.
  local HEADER = '<BBI4I8I8I8I4I4I8I8I4'
  local HEADER_SIZE, WINDOW_OFFSET = 58, 46
  local CHUNK = 8192
  local TOTALS = 4294967296 -- running totals are kept modulo 2^32
  -- A refund in the middle rewrites up to this many totals behind it.
  local MAX_REWRITTEN = 128
  -- A log whose times get wider is copied as it is up to this many requests. A longer one becomes this many blocks, each
  -- at the time of its newest request: that counts units for a little too long, never too short.
  local MAX_COPIED, BLOCKS = 512, 64
  -- A raised window extends up to this many chunks in a call; those that the window has passed are removed, as many at most.
  local MAX_EXTENDED, MAX_UNLINKED = 300, 16

  local function chunk_key(key, number)
    return (string.gsub(key, '}', '}%%' .. number, 1))
  end

  local function chunk_start(index)
    return index - index % CHUNK
  end

  -- How many bytes the requests of a chunk take, from its start on up to before this one.
  local function bytes_before(log, start, index)
    local narrow = math.min(math.max(log.narrow - start, 0), index - start)
    return narrow * log.width + (index - start - narrow) * (log.width + 4)
  end

  -- `size` bytes of a request, from `skip` on: the text that holds them, and their position in it.
  local function bytes(log, index, skip, size)
    local start = chunk_start(index)
    local from = bytes_before(log, start, index) + skip
    local key = log.key
    if start == chunk_start(log.stored) then
      if log.open then return log.open, from + 1 end
      from = from + HEADER_SIZE
      if from + size <= #log.head then return log.head, from + 1 end
    else
      key = chunk_key(key, start / CHUNK)
    end
    if log.piece_key ~= key or from < log.piece_from or from + size > log.piece_from + #log.piece then
      log.piece, log.piece_key, log.piece_from = call('GETRANGE', key, from, from + 255), key, from
    end
    return log.piece, from - log.piece_from + 1
  end

  -- A chunk that is missing (its slot is on its way to another node, or it was evicted) counts as young as the newest
  -- request: that never admits too much, and ends within a window.
  local function time_at(log, index)
    local text, position = bytes(log, index, 0, log.width)
    if #text < position + log.width - 1 then return log.newest end
    return log.newest - (log.newest - unpack_struct(log.time_format, text, position)) % log.modulus
  end

  -- Units from the header's base up to and with this request.
  local function units_at(log, index)
    if index < log.narrow then return index - log.first + 1 end
    local text, position = bytes(log, index, log.width, 4)
    if #text < position + 3 then return 0 end
    return (unpack_struct('<I4', text, position) - log.base) % TOTALS
  end

  -- The lowest index from `low` to `high` for which the test holds; it is known to hold for `high`.
  local function search(low, high, test)
    while low < high do
      local middle = floor((low + high) / 2)
      if test(middle) then high = middle else low = middle + 1 end
    end
    return low
  end

  -- The request with which this number of units is reached.
  local function index_reaching(log, units)
    local index = log.first + units - 1 -- where it is if every request before costs 1
    if index < log.narrow then return index end
    return search(math.max(log.first, log.narrow), log.count - 1, function(i) return units_at(log, i) >= units end)
  end

  local function set_width(log, width)
    log.width, log.modulus, log.time_format = width, 256 ^ width, '<I' .. width
  end

  -- The requests of the chunk that begins at `start`, up to before `index`.
  local function text_of(log, start, index)
    local size = bytes_before(log, start, index)
    if size == 0 then return '' end
    if start ~= chunk_start(log.stored) then return call('GETRANGE', chunk_key(log.key, start / CHUNK), 0, size - 1) end
    if log.open then return sub(log.open, 1, size) end
    if HEADER_SIZE + size <= #log.head then return sub(log.head, HEADER_SIZE + 1, HEADER_SIZE + size) end
    return call('GETRANGE', log.key, HEADER_SIZE, HEADER_SIZE + size - 1)
  end

  -- Keeps the requests before `index` alone.
  local function truncate(log, index)
    log.open = text_of(log, chunk_start(index), index)
    log.count, log.stored, log.narrow = index, index, math.min(index, log.narrow)
  end

  -- How long to make a string of this many bytes: a little room, then up to what the allocator would round up to anyway
  -- (four sizes to each power of two), less the string's own header in Redis.
  local function roomy(size)
    size = size * 33 / 32 + 10
    local step = 16
    while step * 8 < size do step = step * 2 end
    return math.ceil(size / step) * step - 10
  end

  local function entry(log, time, units)
    local text = pack(log.time_format, time % log.modulus)
    return units and text .. pack('<I4', (log.base + units) % TOTALS) or text
  end

  -- Writes the times with another width, from the first request on.
  local function widen(log, width)
    local wider = {base = log.base}
    set_width(wider, width)
    local parts, requests = {}, log.count - log.first
    local narrow = math.max(0, log.narrow - log.first)
    if requests <= MAX_COPIED then
      for index = log.first, log.count - 1 do
        parts[#parts + 1] = entry(wider, time_at(log, index), index >= log.narrow and units_at(log, index))
      end
    else
      narrow = 0
      for block = 1, BLOCKS do
        local index = log.first + math.ceil(block * requests / BLOCKS) - 1
        parts[block] = entry(wider, time_at(log, index), units_at(log, index))
      end
    end
    log.open, log.first, log.live, log.count, log.stored, log.narrow = table.concat(parts), 0, 0, #parts, #parts, narrow
    set_width(log, width)
  end

  -- Removes `units`, the oldest first.
  local function remove_oldest(log, units)
    log.gone, log.units = log.gone + units, log.units - units
    log.live = log.units == 0 and log.count or index_reaching(log, log.gone + 1)
  end

  local function has_sealed_chunks(log)
    return log.first < chunk_start(log.stored)
  end

  -- The window was raised: the sealed chunks have to live longer, too. The oldest first, some in each call.
  local function extend_chunks(key, log, quota)
    local open = chunk_start(log.stored) / CHUNK
    local from = math.max(floor(log.first / CHUNK), log.extended)
    local to = math.min(open, from + MAX_EXTENDED)
    local expires = whole(expiry(log.newest + 2 * quota.window))
    for number = from, to - 1 do
      call('PEXPIREAT', chunk_key(key, number), expires)
    end
    log.extended = to
    if to == open then log.window, log.extended = quota.window, 0 end
  end

  return {
    -- A short log, for the rare actions.
    lengthen = function(key, log)
      log.key, log.head, log.open = key, '', sub(log.short, SHORT_HEADER_SIZE + 1)
      set_width(log, log.width)
      local count = #log.open / log.width
      log.capacity, log.narrow, log.count, log.stored, log.first, log.base, log.gone = 0, count, count, count, 0, 0, log.live
      log.window, log.extended, log.short = 0, 0, nil
    end,

    -- count: the number of the request after the newest, of which those before `narrow` have no total; first: the oldest that
    -- was in the window at the last write; live: the oldest that is now; gone: units from first up to there; units: those in
    -- the window; stored: count as Redis has it; open: the requests of the open chunk, if they are not as Redis has them.
    load = function(key, head, quota)
      local log = {key = key, head = head, units = 0, gone = 0, live = 0, spent = 0}
      local _, width, stored_units
      _, width, log.capacity, log.narrow, log.count, log.first, log.base, stored_units, log.newest, log.window, log.extended =
        unpack_struct(HEADER, head)
      log.stored = log.count
      set_width(log, width)
      log.live = log.count
      if log.newest + quota.window > now then
        log.stepped_back = log.newest > now
        -- Few have left since the last write, so the search starts at the first and doubles its steps.
        local lives = function(i) return time_at(log, i) + quota.window > now end
        local low, high, step = log.first, log.first, 1
        while high < log.count - 1 and not lives(high) do
          low, high, step = high + 1, math.min(high + step, log.count - 1), step * 2
        end
        log.live = search(low, high, lives)
        if log.live > log.first then log.gone = units_at(log, log.live - 1) end
        log.units = stored_units - log.gone
      end
      return log
    end,

    leaves = function(log, units)
      return time_at(log, index_reaching(log, log.gone + units))
    end,

    -- A request in the middle of the open chunk is cut out if that changes few totals. Otherwise older units go instead.
    refund = function(log, quota, cost, since)
      if since == 0 then return remove_oldest(log, math.min(cost, log.units)) end
      if since + quota.window <= now or since > now or log.newest < since then return end
      local first = search(log.live, log.count - 1, function(i) return time_at(log, i) >= since end)
      local before = first > log.live and units_at(log, first - 1) or log.gone
      local removed = math.min(cost, log.gone + log.units - before)
      if first == log.live then return remove_oldest(log, removed) end
      local last = index_reaching(log, before + removed)
      local start, rewritten = chunk_start(log.count - 1), log.count - math.max(last, log.narrow)
      if first < start or rewritten > MAX_REWRITTEN then return remove_oldest(log, removed) end
      local whole = units_at(log, last) == before + removed
      local kept = whole and last + 1 or last
      local newest = kept == log.count and time_at(log, first - 1) or log.newest
      local tail = {}
      if kept < log.narrow then
        -- Requests without totals move as they are.
        tail[1] = sub(text_of(log, start, log.narrow), bytes_before(log, start, kept) + 1)
      end
      for index = math.max(kept, log.narrow), log.count - 1 do
        tail[#tail + 1] = entry(log, time_at(log, index), units_at(log, index) - removed)
      end
      local gone = kept - first
      log.open = text_of(log, start, first) .. table.concat(tail)
      log.narrow = math.max(math.min(log.narrow, first), log.narrow - gone)
      log.count, log.stored = log.count - gone, log.count - gone
      log.newest, log.units = newest, log.units - removed
      log.stepped_back = newest > now
      if gone == 0 and log.count == start + CHUNK then
        -- The chunk is sealed, and stays so.
        local expires = expiry(newest + 2 * math.max(log.window, quota.window))
        call('SET', chunk_key(log.key, start / CHUNK), log.open, 'PXAT', expires)
        log.open = nil
      end
    end,

    extend = function(key, log, quota)
      if has_sealed_chunks(log) and quota.window > log.window then
        extend_chunks(key, log, quota)
        call('SETRANGE', key, WINDOW_OFFSET, pack('<I8I4', log.window, log.extended))
      end
    end,

    save = function(key, log, quota)
      -- Requests that have left the window are skipped from now on, and their sealed chunks removed.
      local passed = floor(math.min(log.live, log.stored) / CHUNK)
      for number = floor(log.first / CHUNK), math.min(passed, floor(log.first / CHUNK) + MAX_UNLINKED) - 1 do
        call('UNLINK', chunk_key(key, number))
      end
      log.base, log.first, log.gone = (log.base + log.gone) % TOTALS, log.live, 0
      if log.first == log.count then
        log.narrow, log.count, log.stored, log.first, log.live, log.base, log.open = 0, 0, 0, 0, 0, 0, ''
      end

      if not has_sealed_chunks(log) then
        log.window, log.extended = quota.window, 0
      elseif quota.window > log.window then
        extend_chunks(key, log, quota)
      end

      -- `kept` units stay as they are stored; after them comes one request of `added` units at `newest`, if any.
      local kept, added = log.units - log.spent, log.spent
      if log.stepped_back then
        -- What lies in the future becomes one request at now.
        truncate(log, search(log.first, log.count - 1, function(i) return time_at(log, i) > now end))
        local units = kept
        kept = log.count > log.first and units_at(log, log.count - 1) or 0
        added = added + units - kept
      end
      local width = width_for(quota.window)
      if width > log.width then widen(log, width) end
      if added > 0 then log.newest = now end

      local appended, units = '', kept + added
      if added > 0 then
        local is_narrow = added == 1 and log.narrow == log.count
        if is_narrow then log.narrow = log.narrow + 1 end
        appended = entry(log, now, not is_narrow and units)
        log.count = log.count + 1
      end

      -- Only denials that count get here with more than the limit. The newest L units say all that matters.
      if log.spent > 0 and quota.count_denied and units > quota.limit then
        local surplus = units - quota.limit
        log.first = surplus < kept and index_reaching(log, surplus + 1) or log.count - 1
        log.base, units = (log.base + surplus) % TOTALS, quota.limit
      end

      local expires = whole(expiry(log.newest + quota.window))
      local function header()
        return pack(HEADER, LONG, log.width, log.capacity, log.narrow, log.count, log.first, log.base, units, log.newest,
          log.window, log.extended)
      end
      local start = chunk_start(log.stored)
      local is_full = log.count - start == CHUNK
      local size = HEADER_SIZE + bytes_before(log, start, log.count)
      local dead = log.first > start and bytes_before(log, start, log.first) or 0
      local wasteful = log.capacity > 1.3 * (size - dead) and log.capacity > roomy(size - dead)
      if not log.open and log.capacity > FIRST_READ and size <= log.capacity and not wasteful and not is_full then
        if added > 0 then call('SETRANGE', key, size - #appended, appended) end
        call('SETRANGE', key, 0, header())
        call('PEXPIREAT', key, expires)
        return
      end
      local text = text_of(log, start, log.stored) .. appended
      if log.first > start and (not is_full or log.first - start >= CHUNK / 8) then
        -- All that counts is in the open chunk, which begins with the oldest from now on.
        text = sub(text, dead + 1)
        log.narrow, log.count, log.first = math.max(0, log.narrow - log.first), log.count - log.first, 0
        start, is_full = 0, false
      end
      if start == 0 and log.first == 0 and log.narrow == log.count and SHORT_HEADER_SIZE + #text <= FIRST_READ then
        call('SET', key, pack('<BBI8', SHORT, log.width, log.newest) .. text, 'PXAT', expires)
        return
      end
      if is_full then
        local longest = math.max(log.window, quota.window)
        call('SET', chunk_key(key, start / CHUNK), text, 'PXAT', expiry(log.newest + 2 * longest))
        text = ''
      end
      size = HEADER_SIZE + #text
      log.capacity = size <= FIRST_READ and size or roomy(size)
      call('SET', key, header() .. text .. string.rep('\0', log.capacity - size), 'PXAT', expires)
    end,
  }
end
local long_form

-- What all short logs that take something now, under this quota, have in common.
local function prepare(quota)
  local width = width_for(quota.window)
  quota.width, quota.modulus, quota.time_format = width, 256 ^ width, '<I' .. width
  quota.header = pack('<BBI8', SHORT, width, now)
  quota.stamp = pack(quota.time_format, now % quota.modulus)
  quota.expires = whole(expiry(now + quota.window))
end

algorithms['sliding-log-packed'] = {
  alt_suffix = 'packed',
  counts_denied = true,

  -- short: the string; live: the oldest request in the window, from 0; units: those in the window; spent: what save() has to
  -- write.
  load = function(key, quota)
    if not quota.width then prepare(quota) end
    local text
    if quota.limit <= 120 then
      -- It is short, but just after a limit was lowered.
      text = read('GET', key)
    else
      text = read('GETRANGE', key, 0, FIRST_READ - 1)
    end
    local magic, width = string.byte(text or '', 1, 2)
    if magic ~= SHORT or #text <= SHORT_HEADER_SIZE then
      if magic == LONG then
        long_form = long_form or make_long_form()
        return long_form.load(key, text, quota)
      end
      local other_type = text == nil or magic ~= nil
      return {
        short = '', width = quota.width, newest = 0, live = 0, units = 0, spent = 0, other_type = other_type, absent = not other_type,
      }
    end
    local newest, count, live = unpack_struct('<I8', text, 3), (#text - SHORT_HEADER_SIZE) / width, 0
    local format, modulus = quota.time_format, quota.modulus
    if width ~= quota.width then format, modulus = '<I' .. width, 256 ^ width end
    -- A request is in the window if it is older than the newest by less than this.
    local reach = newest + quota.window - now
    if reach <= 0 then
      live = count
    elseif (newest - unpack_struct(format, text, SHORT_HEADER_SIZE + 1)) % modulus >= reach then
      local high = count - 1
      live = 1
      while live < high do
        local middle = floor((live + high) / 2)
        local age = (newest - unpack_struct(format, text, SHORT_HEADER_SIZE + 1 + middle * width)) % modulus
        if age < reach then high = middle else live = middle + 1 end
      end
    end
    local log = {short = text, width = width, newest = newest, live = live, units = count - live, spent = 0}
    if newest > now then log.stepped_back = true end
    return log
  end,

  remaining = function(log, quota)
    local remaining = quota.limit - log.units
    return remaining > 0 and remaining or 0
  end,

  level = function(log)
    return log.units
  end,

  overdrawn = function(log, quota)
    return log.units > quota.limit
  end,

  retry_after = function(log, quota, cost, counted)
    local must_leave = log.units + counted + cost - quota.limit
    if must_leave > log.units - log.spent then return quota.window end
    local leaves
    if log.short then
      local from = SHORT_HEADER_SIZE + 1 + (log.live + must_leave - 1) * log.width
      leaves = log.newest - (log.newest - unpack_struct('<I' .. log.width, log.short, from)) % 256 ^ log.width
    else
      leaves = long_form.leaves(log, must_leave)
    end
    return math.min(leaves, now) + quota.window - now
  end,

  reset_after = function(log, quota, extra)
    if extra + log.spent > 0 then return quota.window end
    return log.units == 0 and 0 or math.min(log.newest, now) + quota.window - now
  end,

  counts_until = function(log, quota)
    return log.newest + quota.window
  end,

  spend = function(log, quota, cost)
    log.spent = cost
    log.units = log.units + cost
  end,

  refund = function(key, log, quota, cost, since)
    long_form = long_form or make_long_form()
    if log.short then long_form.lengthen(key, log) end
    long_form.refund(log, quota, cost, since)
  end,

  is_empty = function(log)
    return log.units == 0
  end,

  extend = function(key, log, quota)
    if not log.short then long_form.extend(key, log, quota) end
  end,

  save = function(key, log, quota)
    local text, spent = log.short, log.spent
    -- A few units that come together are still written as single requests.
    if text and spent > 0 and spent <= 8 and not log.stepped_back and log.width == quota.width
      and SHORT_HEADER_SIZE + log.units * log.width <= FIRST_READ
      and not (quota.count_denied and log.units > quota.limit) then
      local kept = sub(text, SHORT_HEADER_SIZE + 1 + log.live * log.width)
      local stamp = spent == 1 and quota.stamp or string.rep(quota.stamp, spent)
      call('SET', key, quota.header .. kept .. stamp, 'PXAT', quota.expires)
      return
    end
    long_form = long_form or make_long_form()
    if text then long_form.lengthen(key, log) end
    long_form.save(key, log, quota)
  end,
}
