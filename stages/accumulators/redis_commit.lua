-- Commits a flush atomically: marks its batches as done, adds to the totals and queues its chunks.
-- KEYS: identity, done, totals, pending. ARGV: identity, the flush as JSON, the chunks.
-- Returns committed; refused: a batch is done already, perhaps by a call whose answer was lost; or lost: the server has
-- lost its identity or activation bits of this flush.
local identity, done, totals, pending = unpack(KEYS)
if redis.call('GET', identity) ~= ARGV[1] then return 'lost' end
local flush = cjson.decode(ARGV[2])
for _, batch in ipairs(flush.batches) do
  if redis.call('SISMEMBER', done, batch) == 1 then return 'refused' end
end
for _, range in ipairs(flush.bits) do
  local key, first, last, ones = unpack(range)
  if redis.call('BITCOUNT', key, first, last) ~= ones then return 'lost' end
end
for name, value in pairs(flush.totals) do redis.call('HINCRBYFLOAT', totals, name, value) end
for _, batch in ipairs(flush.batches) do redis.call('SADD', done, batch) end
for chunk = 3, #ARGV do redis.call('RPUSH', pending, ARGV[chunk]) end
return 'committed'
