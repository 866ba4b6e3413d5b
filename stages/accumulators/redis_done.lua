-- The bitmap of the committed batches, and what commits have counted: how many, and the sum of their check numbers.
-- KEYS: done, totals. ARGV: bytes that the bitmap may have; a larger one is not sent.
local found = redis.call('HMGET', KEYS[2], 'batches', 'marks')
local fits = redis.call('STRLEN', KEYS[1]) <= tonumber(ARGV[1])
return {found[1] or '0', found[2] or '0', fits and (redis.call('GET', KEYS[1]) or '')}
