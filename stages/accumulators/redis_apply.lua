-- Adds the first pending chunk to the sums and removes it; returns the number of chunks that are left.
-- KEYS: pending. ARGV: as JSON, for every field of a neuron its projection (1 gate, 2 up, 3 down), name and column in the
-- chunk; the number of columns.
local chunk = redis.call('LINDEX', KEYS[1], 0)
if not chunk then return 0 end
local neuron, gate, up, down, at = struct.unpack('<I4sss', chunk)
local prefixes, fields, format = {gate, up, down}, cjson.decode(ARGV[1]), '<' .. string.rep('d', tonumber(ARGV[2]))
while at <= #chunk do
  local row = {struct.unpack(format, chunk, at)}
  at = row[#row]
  for _, entry in ipairs(fields) do
    local key, field, value, reply = prefixes[entry[1]] .. neuron, entry[2], row[entry[3]], nil
    if value == 0 then -- a missing field counts as 0
    elseif field == 'max_abs' then
      reply = redis.pcall('HGET', key, field)
      -- A value that is no number stays, so that readers detect it.
      if type(reply) ~= 'table' and value > (tonumber(reply or 0) or value) then
        redis.call('HSET', key, field, value)
      end
    else
      reply = redis.pcall('HINCRBYFLOAT', key, field, value) -- Redis gives Lua's numbers 17 digits
    end
    if type(reply) == 'table' then return redis.error_reply(reply.err .. ' | key ' .. key) end
  end
  neuron = neuron + 1
end
redis.call('LPOP', KEYS[1])
return redis.call('LLEN', KEYS[1])
