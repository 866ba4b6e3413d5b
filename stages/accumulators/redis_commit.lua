-- Commits or refuses a staged flush atomically.
-- KEYS: identity, done, counters, totals, pending, then the staged chunks.
-- ARGV: identity, number of batches, the batches, then for each counter the index of its key, its name and increment, then
-- the chunks' names.
-- Returns committed (now, or by a call whose answer was lost), refused (a batch is done already; the chunks are deleted),
-- unstaged (chunks are missing), or strange (the namespace belongs to another scan).
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'strange' end

-- All checks come before the first write: a failure after it would leave a partial commit.
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
