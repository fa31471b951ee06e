// Reads each file of a list once, by several threads: reader THREADS < LIST. It prints files, bytes and seconds.
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static char **paths;
static long count;
static atomic_long next, bytes;

static void *run(void *unused) {
	(void)unused;
	size_t size = 1 << 20;
	char *buf = malloc(size);
	for (long i; (i = atomic_fetch_add(&next, 1)) < count;) {
		int fd = open(paths[i], O_RDONLY | O_CLOEXEC);
		if (fd < 0) {
			perror(paths[i]);
			exit(1);
		}
		long sum = 0;
		ssize_t n;
		while ((n = read(fd, buf, size)) > 0)
			sum += n;
		if (n < 0 || sum == 0) {
			perror(paths[i]);
			exit(1);
		}
		atomic_fetch_add(&bytes, sum);
		close(fd);
	}
	free(buf);
	return NULL;
}

int main(int argc, char **argv) {
	int threads = argc > 1 ? atoi(argv[1]) : 1;
	char *line = NULL;
	size_t cap = 0;
	for (ssize_t n; (n = getline(&line, &cap, stdin)) > 0;) {
		if (line[n - 1] == '\n')
			line[n - 1] = 0;
		if (count % 4096 == 0)
			paths = realloc(paths, (count + 4096) * sizeof *paths);
		paths[count++] = strdup(line);
	}
	pthread_t all[256];
	struct timespec a, b;
	clock_gettime(CLOCK_MONOTONIC, &a);
	for (int i = 0; i < threads && i < 256; i++)
		pthread_create(&all[i], NULL, run, NULL);
	for (int i = 0; i < threads && i < 256; i++)
		pthread_join(all[i], NULL);
	clock_gettime(CLOCK_MONOTONIC, &b);
	printf("%ld %ld %.6f\n", count, atomic_load(&bytes), (b.tv_sec - a.tv_sec) + (b.tv_nsec - a.tv_nsec) / 1e9);
	return 0;
}
