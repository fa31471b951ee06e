// Package levenshtein measures the distance between two words, for errors that suggest the nearest valid one.
package levenshtein

// Distance returns the least number of bytes to insert, delete or replace to turn a into b (V. Levenshtein, 1966). It
// takes O(len(a)·len(b)) time.
func Distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			d := diagonal
			if a[i] != b[j] {
				d = 1 + min(diagonal, row[j], row[j+1])
			}
			diagonal, row[j+1] = row[j+1], d
		}
	}
	return row[len(b)]
}

// Nearest returns the word that an unknown one probably means, or "". At most one byte in every `every` may differ, and
// at most three.
func Nearest(word string, words []string, every int) string {
	best, distance := "", min(len(word)/every, 3)+1
	for _, w := range words {
		if d := Distance(word, w); d < distance {
			best, distance = w, d
		}
	}
	return best
}
