-- Decides the fate of a staged flush, all of it at once.
-- KEYS: identity, done, counters, pending, then the staged chunks.
-- ARGV: identity, count of batches, their numbers, then name and increment of each counter, after that the chunks' names.
-- Returns committed (now, or by a call whose answer was lost), refused (one of its batches is done: the chunks are gone),
-- unstaged (chunks are missing), or strange (the namespace is not this scan's).
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'strange' end

-- Nothing may fail once the first write is done.
for number, kind in pairs({[2] = 'string', [3] = 'hash', [4] = 'set'}) do
  local found = redis.call('TYPE', KEYS[number]).ok
  if found ~= kind and found ~= 'none' then
    return redis.error_reply('WRONGTYPE ' .. KEYS[number] .. ' is a ' .. found)
  end
end

local chunks = #KEYS - 4
local batches = tonumber(ARGV[2])
local names = #ARGV - chunks
for counter = 3 + batches, names, 2 do
  if not tonumber(redis.call('HGET', KEYS[3], ARGV[counter]) or 0) then
    return redis.error_reply('ERR ' .. KEYS[3] .. ' ' .. ARGV[counter] .. ' is not a number')
  end
end
for chunk = 1, chunks do
  if redis.call('SISMEMBER', KEYS[4], ARGV[names + chunk]) == 1 then return 'committed' end
end
for batch = 1, batches do
  if redis.call('GETBIT', KEYS[2], ARGV[2 + batch]) == 1 then
    for chunk = 1, chunks do redis.call('DEL', KEYS[4 + chunk]) end
    return 'refused'
  end
end
for chunk = 1, chunks do
  if redis.call('EXISTS', KEYS[4 + chunk]) == 0 then return 'unstaged' end
end

for batch = 1, batches do redis.call('SETBIT', KEYS[2], ARGV[2 + batch], 1) end
for counter = 3 + batches, names, 2 do redis.call('HINCRBYFLOAT', KEYS[3], ARGV[counter], ARGV[counter + 1]) end
for chunk = 1, chunks do
  redis.call('PERSIST', KEYS[4 + chunk])
  redis.call('SADD', KEYS[4], ARGV[names + chunk])
end
return 'committed'
