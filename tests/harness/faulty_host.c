/* What a process thinks of its disk and its clock, as a file says: for LD_PRELOAD.
 *
 * The file that FAULTY_HOST names holds three numbers of 64 bits: the errno that syncs end with, how
 * many ms they take, and by how many ms the wall clock is ahead. It may change at any time. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct faults {
    int64_t sync_errno, sync_ms, clock_ms;
};

static const volatile struct faults *faults;

__attribute__((constructor)) static void look(void) {
    const char *name = getenv("FAULTY_HOST");
    int fd = name == NULL ? -1 : open(name, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    void *map = mmap(NULL, sizeof *faults, PROT_READ, MAP_SHARED, fd, 0);
    faults = map == MAP_FAILED ? NULL : map;
    close(fd);
}

static int sync_by(long call, int fd) {
    if (faults != NULL && faults->sync_ms > 0) {
        struct timespec pause = {faults->sync_ms / 1000, faults->sync_ms % 1000 * 1000000};
        nanosleep(&pause, NULL);
    }
    if (faults != NULL && faults->sync_errno != 0) {
        errno = (int)faults->sync_errno;
        return -1;
    }
    return (int)syscall(call, fd);
}

int fsync(int fd) { return sync_by(SYS_fsync, fd); }

int fdatasync(int fd) { return sync_by(SYS_fdatasync, fd); }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && clock == CLOCK_REALTIME && faults != NULL)
        now->tv_sec += faults->clock_ms / 1000;
    return result;
}
