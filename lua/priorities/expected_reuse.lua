--- Expected reuse: brings the prefixes that most requests have shared so far first; they
-- will be asked for again, and will then be on the device.
-- Reads   view.reuse: how many requests so far had these blocks, on average
-- Fails   it ignores the queue: a popular prefix comes before the next request's blocks
return function(_, view) return -math.floor(view.reuse) end
