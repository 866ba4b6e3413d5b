-- Claims a namespace for a scan, unless it is claimed already.
-- KEYS: identity, then keys that exist only after a scan of this namespace. ARGV: identity.
-- Returns the identity of the scan that holds the namespace, or a list with the key that prevents the claim.
local held = redis.call('GET', KEYS[1])
if held then return held end
for number = 2, #KEYS do
  if redis.call('EXISTS', KEYS[number]) == 1 then return {KEYS[number]} end
end
redis.call('SET', KEYS[1], ARGV[1])
return ARGV[1]
