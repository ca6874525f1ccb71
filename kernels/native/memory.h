/* Memory that a thread keeps from call to call. */

#include <stdlib.h>

/* Return this thread's memory of at least `size` bytes, which it keeps; null if there is none. */
static inline char *memory_of_thread(size_t size) {
    static _Thread_local char *memory;
    static _Thread_local size_t held;
    if (size > held) {
        free(memory);
        memory = malloc(size);
        held = memory ? size : 0;
    }
    return memory;
}
