-- Returns the number of committed batches, the sum of their check numbers, and their bitmap.
-- KEYS: done, totals. ARGV: maximum bytes of the bitmap; a larger one is not returned.
local found = redis.call('HMGET', KEYS[2], 'batches', 'marks')
local fits = redis.call('STRLEN', KEYS[1]) <= tonumber(ARGV[1])
return {found[1] or '0', found[2] or '0', fits and (redis.call('GET', KEYS[1]) or '')}
