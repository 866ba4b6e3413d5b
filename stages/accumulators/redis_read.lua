-- Returns the sums of some neurons of a layer, as rows of little-endian doubles.
-- ARGV: key prefixes of the gate, up and down rows, number of the first neuron, count of neurons, then for every column its
-- projection (1 gate, 2 up, 3 down) and field. An extra last column is 0, or the projection with an unknown field.
local fields, columns = {{}, {}, {}}, {}
for word = 6, #ARGV, 2 do
  local column, list = #columns + 1, fields[tonumber(ARGV[word])]
  list[#list + 1], list[#list + 2] = ARGV[word + 1], ARGV[word + 1] .. '_tiny'
  columns[column] = {tonumber(ARGV[word]), #list - 1}
end
local row_format, neurons = '<' .. string.rep('d', #columns + 1), {}
for neuron = tonumber(ARGV[4]), ARGV[4] + ARGV[5] - 1 do
  local found, row, strange = {}, {}, 0
  for projection = 1, 3 do
    local key, known = ARGV[projection] .. neuron, 0
    if #fields[projection] > 0 then
      found[projection] = redis.call('HMGET', key, unpack(fields[projection]))
      for field = 1, #fields[projection] do
        if found[projection][field] then known = known + 1 end
      end
    end
    if redis.call('HLEN', key) > known then strange = projection end
  end
  for column, place in ipairs(columns) do
    local values = found[place[1]]
    -- A value that is no number makes the sum NaN (0 / 0).
    row[column] = (tonumber(values[place[2]] or 0) or 0 / 0) + (tonumber(values[place[2] + 1] or 0) or 0 / 0) * 2 ^ -128
  end
  row[#columns + 1] = strange
  neurons[#neurons + 1] = struct.pack(row_format, unpack(row))
end
return table.concat(neurons)
