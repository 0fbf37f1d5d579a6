# Application that answers with what Rack, behind puma, read from the request. Prints its port, and
# exits when its standard input ends.
require 'json'
require 'puma'
require 'puma/server'
require 'rack'

def text(value)
  value.scrub if value.is_a?(String)
end

app = lambda do |env|
  request = Rack::Request.new(env)
  authorization = env['HTTP_AUTHORIZATION'] || ''
  basic = Rack::Auth::Basic::Request.new(env)
  seen = {
    route: request.path == '/limited/x' ? 'limited' : 'other',
    cookie: text(request.cookies['session_id']),
    header: text(env['HTTP_X_USER_ID']),
    query: text(request.GET['api_key']),
    token: text(authorization[/\ABearer\s+(.+)\z/i, 1]&.strip),
    basic: basic.provided? && basic.basic? ? text(basic.credentials.join(':')) : nil
  }
  [200, { 'Content-Type' => 'application/json' }, [seen.to_json]]
end

server = Puma::Server.new(app, Puma::Events.null)
port = server.add_tcp_listener('127.0.0.1', 0).addr[1]
server.run
$stdout.puts port
$stdout.flush
$stdin.read
server.stop(true)
