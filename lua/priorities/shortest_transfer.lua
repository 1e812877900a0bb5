--- Shortest transfer first: brings the fewest bytes first, because serving the shortest
-- job first gives the least mean wait.
-- Reads   view.bytes
-- Fails   long prefixes starve while short ones keep coming. Where requests run in the
--         order of the queue, the first request waits for the blocks of later ones
return function(_, view) return math.floor(view.bytes / 2 ^ 16) end
