-- Returns the sums of some neurons of a layer, as rows of little-endian doubles: 0 for a missing field, NaN for a value
-- that is no number.
-- ARGV: number of the first neuron, count of neurons, then for every column the prefix of its key and its field.
local values = {}
for neuron = tonumber(ARGV[1]), ARGV[1] + ARGV[2] - 1 do
  for word = 3, #ARGV, 2 do
    local found = redis.call('HGET', ARGV[word] .. neuron, ARGV[word + 1])
    values[#values + 1] = struct.pack('<d', tonumber(found or 0) or 0 / 0)
  end
end
return table.concat(values)
