-- Decides the fate of a staged flush, all of it at once.
-- KEYS: identity, done, counters, totals, pending, then the staged chunks.
-- ARGV: identity, count of batches, their numbers, then of each count which key it is in, name and increment, after that
-- the chunks' names.
-- Returns committed (now, or by a call whose answer was lost), refused (one of its batches is done: the chunks are gone),
-- unstaged (chunks are missing), or strange (the namespace is not this scan's).
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'strange' end

-- Nothing may fail once the first write is done.
for number, kind in pairs({[2] = 'string', [3] = 'hash', [4] = 'hash', [5] = 'set'}) do
  local found = redis.call('TYPE', KEYS[number]).ok
  if found ~= kind and found ~= 'none' then
    return redis.error_reply('WRONGTYPE ' .. KEYS[number] .. ' is a ' .. found)
  end
end

local chunks = #KEYS - 5
local batches = tonumber(ARGV[2])
local names = #ARGV - chunks
for count = 3 + batches, names, 3 do
  local key = KEYS[tonumber(ARGV[count])]
  if not tonumber(redis.call('HGET', key, ARGV[count + 1]) or 0) then
    return redis.error_reply('CHANGED ' .. key .. ' ' .. ARGV[count + 1] .. ' is not a number')
  end
end
for chunk = 1, chunks do
  if redis.call('SISMEMBER', KEYS[5], ARGV[names + chunk]) == 1 then return 'committed' end
end
for batch = 1, batches do
  if redis.call('GETBIT', KEYS[2], ARGV[2 + batch]) == 1 then
    for chunk = 1, chunks do redis.call('DEL', KEYS[5 + chunk]) end
    return 'refused'
  end
end
for chunk = 1, chunks do
  if redis.call('EXISTS', KEYS[5 + chunk]) == 0 then return 'unstaged' end
end

for batch = 1, batches do redis.call('SETBIT', KEYS[2], ARGV[2 + batch], 1) end
for count = 3 + batches, names, 3 do
  redis.call('HINCRBYFLOAT', KEYS[tonumber(ARGV[count])], ARGV[count + 1], ARGV[count + 2])
end
for chunk = 1, chunks do
  redis.call('PERSIST', KEYS[5 + chunk])
  redis.call('SADD', KEYS[5], ARGV[names + chunk])
end
return 'committed'
