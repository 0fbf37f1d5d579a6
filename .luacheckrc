-- Lua of the scripts in Redis: Lua 5.1, without what its sandbox does not have.
std = 'lua51'
globals = {'ARGV'} -- its fields: a header is replaced while a fast path reads it
read_globals = {
  'KEYS',
  'include', -- store/redis/script.rs replaces it by the text of a file
  redis = {fields = {'call', 'pcall'}},
  struct = {fields = {'pack', 'unpack'}},
}
not_globals = {
  'collectgarbage', 'coroutine', 'debug', 'dofile', 'io', 'loadfile', 'module', 'os', 'package',
  'print', 'require',
}
max_line_length = 100
unused_args = false -- the functions of all algorithms have the same parameters
redefined = false -- a parameter of the same name is faster than a variable of the script
files['deploy/haproxy'] = {std = 'lua53', read_globals = {'core', 'os'}}
