-- Adds a committed chunk to the sums and deletes it; a repeated call does nothing.
-- KEYS: chunk, pending. ARGV: the chunk's name in pending, then for every field of a neuron its projection (1 gate, 2 up,
-- 3 down), name, column in the chunk, and 1 for a maximum.
-- Returns the number of increments.
if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 0 then return 0 end
local chunk = redis.call('GET', KEYS[1])
if not chunk then return redis.error_reply('GONE ' .. KEYS[1]) end
local call, unpack_, TINY, UNIT = redis.pcall, struct.unpack, 2 ^ -24, 2 ^ 128

-- Redis does not roll back a failed script. The chunk stores how many fields are already added; the next call skips them.
local function give_up(reply, key, passed, skip)
  if passed > skip then redis.call('SETRANGE', KEYS[1], 0, struct.pack('<I4', passed)) end
  local why = string.find(reply.err, 'not a float', 1, true) and 'CHANGED a field is not a number' or reply.err
  return redis.error_reply(why .. ' | key ' .. key)
end

local skip, first, width, at = unpack_('<I4I4I4', chunk)
local increments = 0
if width == 0 then
  local key
  key, at = unpack_('s', chunk, at)
  local reply = call('SETRANGE', key, first, string.sub(chunk, at))
  if type(reply) == 'table' then return give_up(reply, key, 0, 0) end
else
  local gate, up, down
  gate, up, down, at = unpack_('sss', chunk, at)
  local projections, fields, columns, greatest = {}, {}, {}, {}
  for word = 2, #ARGV, 4 do
    local entry = #fields + 1
    projections[entry], fields[entry] = tonumber(ARGV[word]), ARGV[word + 1]
    columns[entry], greatest[entry] = tonumber(ARGV[word + 2]), ARGV[word + 3] == '1'
  end
  local row_format, passed = '<' .. string.rep('d', width), 0
  for neuron = first, first + (#chunk - at + 1) / (8 * width) - 1 do
    local row = {unpack_(row_format, chunk, at)}
    at = row[width + 1]
    local keys = {gate .. neuron, up .. neuron, down .. neuron}
    for entry = 1, #fields do
      local value = row[columns[entry]]
      if value ~= 0 and passed >= skip then
        local key, field, reply = keys[projections[entry]], fields[entry]
        if greatest[entry] then
          reply = call('HGET', key, field)
          -- A value that is no number stays, so that readers detect it.
          if not reply or (type(reply) == 'string' and value > (tonumber(reply) or 1 / 0)) then
            reply = call('HSET', key, field, value)
          end
        -- Redis formats Lua numbers with 17 digits, so that no precision is lost.
        elseif value < TINY then
          reply = call('HINCRBYFLOAT', key, field .. '_tiny', value * UNIT)
        else
          reply = call('HINCRBYFLOAT', key, field, value)
        end
        if type(reply) == 'table' then return give_up(reply, key, passed, skip) end
        increments = increments + 1
      end
      passed = passed + 1
    end
  end
end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[1])
return increments
