--- Shortest transfer first: the least bytes, as shortest-job-first has the least mean
-- wait.
-- Reads   view.bytes
-- Fails   long prefixes starve while short ones keep coming; and where requests run in
--         the order of the queue, the one whose turn it is waits for those behind it
return function(_, view) return math.floor(view.bytes / 2 ^ 16) end
