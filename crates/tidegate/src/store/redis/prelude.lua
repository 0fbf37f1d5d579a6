-- Exact integers and the time, which all algorithms use. A script is assembled from this file, the
-- algorithms that the call needs, and decide.lua, which documents KEYS, ARGV and the reply.
--
-- A Lua number is a double: integers are exact below 2^53. Times in microseconds since the epoch
-- are near 2^51, limits at most 10^12 < 2^40, windows at most 366 days < 2^45, so only products can
-- lose precision. A number keeps 17 digits as an argument of a Redis command, but only 14 when it
-- is concatenated to a string, which therefore needs whole().

local call, floor = redis.call, math.floor

-- Formats an integer with all of its digits.
local function whole(number)
  return string.format('%.0f', number)
end

-- Returns the exact quotient and remainder of a * b / m. b and m must be below 2^45, a and the
-- quotient below 2^53.
local function mul_div_rem(a, b, m)
  local product = a * b
  if product < 4503599627370496 then -- 2^52: the product is exact, and so is its division
    local quotient = floor(product / m)
    return quotient, product - quotient * m
  end
  -- Long division, digit by digit of a in base 128: each step stays below 2^53.
  local digits, count = {}, 0
  repeat
    local higher = floor(a / 128)
    count = count + 1
    digits[count] = a - higher * 128
    a = higher
  until a == 0
  local quotient, rest = 0, 0
  for i = count, 1, -1 do
    local step = rest * 128 + digits[i] * b
    local times = floor(step / m)
    quotient = quotient * 128 + times
    rest = step - times * m
  end
  return quotient, rest
end

local function mul_div_ceil(a, b, m)
  local quotient, rest = mul_div_rem(a, b, m)
  return rest > 0 and quotient + 1 or quotient
end

-- The server's time, unless a test passes another.
local clock = call('TIME')
local server_time = clock[1] * 1000000 + clock[2]
local now, expiry_shift = server_time, 0
if ARGV[1] ~= '' then
  -- A test's clock may stop while the server's goes on, so keys expire an hour later.
  expiry_shift = now - ARGV[1] + 3600000000
  now = tonumber(ARGV[1])
end

-- Returns the argument of PEXPIREAT for a key that counts until this microsecond: the millisecond
-- after it, because PEXPIREAT with the current millisecond deletes the key at once.
local function expiry(micros)
  return floor((micros + expiry_shift) / 1000) + 1
end

-- Reads a key. Returns nil if it has another type, which another algorithm has written.
local function read(...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then
    if reply.err:find('WRONGTYPE', 1, true) then return nil end
    return call(...) -- raises the original error
  end
  return reply
end

-- Remaining budget of this call for the removal of expired members of sorted sets, each of which
-- takes about 0.2 microseconds.
local removals = 1000

local algorithms = {}
