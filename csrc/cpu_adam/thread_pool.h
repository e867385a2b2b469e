// Threads for memory-bound loops: the caller works too, chunks are handed out one by one, idle threads sleep.
//
// Threads start at the first loop that can use them, block every signal, and are never joined: the pool lives
// as long as the process. After fork() the child forgets the parent's pool (whose threads it does not have)
// and makes its own when needed. Loops of several callers run side by side: idle threads help the oldest one
// that has chunks left, each caller works on its own, and nobody waits for another's loop.
#pragma once

#include <cstddef>

namespace offload::cpu_adam {

using Task = void (*)(void* context, std::size_t index);  // must not throw

// Calls task(context, i) once for every i < count and returns when all have finished.
void parallel_for(std::size_t count, Task task, void* context);

void set_num_threads(std::size_t count);  // callers included, at least 1
std::size_t num_threads();

template <typename Body>
void parallel_for(std::size_t count, Body& body) {
    parallel_for(
        count, [](void* context, std::size_t index) { (*static_cast<Body*>(context))(index); }, &body);
}

}  // namespace offload::cpu_adam
