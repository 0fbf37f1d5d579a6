-- What every algorithm stands on: exact integers and the time. Script assembly puts this first, then the algorithms
-- that the call needs, then decide.lua, which holds the contract of KEYS, ARGV and the reply.
--
-- A Lua number is a double: integers are exact below 2^53. Times in microseconds since the epoch are near 2^51, limits at
-- most 10^12 < 2^40, windows at most 366 days < 2^45. Only products need care. A number that goes into a Redis command as
-- an argument keeps 17 digits; in a string it would keep 14, so there it goes through whole().

local call, floor = redis.call, math.floor

local function whole(number)
  return string.format('%.0f', number)
end

-- a * b / m as quotient and remainder, exactly. b and m below 2^45; a and the quotient below 2^53.
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

-- Tests hand the time in; in production it is always the server's.
local clock = call('TIME')
local server_time = clock[1] * 1000000 + clock[2]
local now, expiry_shift = server_time, 0
if ARGV[1] ~= '' then
  -- Their time stands still while real time goes on: keys live an hour longer on the real clock.
  expiry_shift = now - ARGV[1] + 3600000000
  now = tonumber(ARGV[1])
end

-- The millisecond for PEXPIREAT of a key that counts until this microsecond. Not the one in which it falls: a key that
-- is set to expire at the present millisecond is deleted at once.
local function expiry(micros)
  return floor((micros + expiry_shift) / 1000) + 1
end

-- The reply of a first read; nil if the key holds another kind of value, left by another algorithm.
local function read(...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then
    if reply.err:find('WRONGTYPE', 1, true) then return nil end
    return call(...) -- raises the error as it is
  end
  return reply
end

-- How many members of sorted sets this call may still remove at leisure: to remove one takes Redis some 0.2 microseconds.
local removals = 1000

local algorithms = {}
