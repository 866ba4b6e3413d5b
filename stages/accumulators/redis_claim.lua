-- Makes a namespace this scan's, or says whose it is.
-- KEYS: identity, then keys that only a scan of this namespace may have made. ARGV: identity.
-- Returns the identity that holds, or a list with the key that is in the way.
local held = redis.call('GET', KEYS[1])
if held then return held end
for number = 2, #KEYS do
  if redis.call('EXISTS', KEYS[number]) == 1 then return {KEYS[number]} end
end
redis.call('SET', KEYS[1], ARGV[1])
return ARGV[1]
