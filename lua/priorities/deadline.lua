--- Earliest deadline first: serves the request whose first token is due soonest.
-- Source  Liu and Layland 1973: optimal for one resource that is not overloaded
-- Reads   request.deadline_us
-- Fails   under overload it still serves requests that can no longer be in time
return function(request) return math.floor(request.deadline_us / 1000) end
