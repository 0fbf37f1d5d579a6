-- Ends the fast path of a hold. If it has left the request to hold.lua, a group follows after a 2.
-- decide.lua includes this file.
-- inputs
-- luacheck: read globals from held_header held_to keys mode pack recorded run server_time try
-- outputs
-- luacheck: globals argv kind replied reply slow to
-- luacheck: no unused

to = held_to
if mode then
  argv[run] = held_header
  if slow then
    -- Its count was not written.
    if recorded then try('UNLINK', keys[from + 1]) end
    kind, slow, reply = 0, from, reply or {pack('<d', server_time)}
    replied = replied + 1
    reply[replied] = pack('<d', 2)
  end
end
