// Plays the guessing game of examples/number_guess with the policy of a run: sluice-agent [HOST:PORT] [RUN]
// It tells the policy "higher" or "lower", and rewards it the more, the sooner it finds the number.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"syscall"
	"time"

	pb "sluice-agent/sluicev1"
)

const (
	guesses = 6
	atATime = 64
	report  = 500 // games between two lines of output
)

func play(ctx context.Context, episode *Episode) (float64, error) {
	data := episode.Task.Data.AsMap()
	low, high, secret := data["low"].(float64), data["high"].(float64), data["secret"].(float64)
	messages := []*pb.ChatMessage{{Role: "user", Content: fmt.Sprintf("%v-%v", low, high)}}
	for turn := range guesses {
		generation, err := episode.Generate(ctx, messages)
		if err != nil {
			return 0, err
		}
		guess, err := strconv.ParseUint(generation.Message.Content, 10, 32)
		if err != nil {
			return 0, nil // not a number
		}
		if float64(guess) == secret {
			return 1 - float64(turn)/guesses, nil
		}
		hint := "lower"
		if float64(guess) < secret {
			hint = "higher"
		}
		messages = append(messages, generation.Message, &pb.ChatMessage{Role: "user", Content: hint})
	}
	return 0, nil
}

// scored prints the mean reward of the last games now and then.
func scored(play func(context.Context, *Episode) (float64, error)) func(context.Context, *Episode) (float64, error) {
	var lock sync.Mutex
	began, games, sum := time.Now(), 0, 0.0
	return func(ctx context.Context, episode *Episode) (float64, error) {
		reward, err := play(ctx, episode)
		lock.Lock()
		defer lock.Unlock()
		if err == nil {
			games, sum = games+1, sum+reward
			if games%report == 0 {
				fmt.Printf("%d games, mean reward of the last %d: %.3f, %.0f s\n", games, report, sum/report, time.Since(began).Seconds())
				sum = 0
			}
		}
		return reward, err
	}
}

// setting returns an argument, or the variable that an evaluation sets, or a default.
func setting(number int, variable, otherwise string) string {
	if len(os.Args) > number {
		return os.Args[number]
	}
	if value := os.Getenv(variable); value != "" {
		return value
	}
	return otherwise
}

func main() {
	target, run := setting(1, "SLUICE_GATEWAY", "127.0.0.1:7105"), setting(2, "SLUICE_RUN", "number_guess")
	agent, err := NewAgent(target, run, os.Getenv("SLUICE_TOKEN_FILE"), os.Getenv("SLUICE_TLS_CA"))
	if err != nil {
		log.Fatal(err)
	}
	defer agent.Close()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	played, err := agent.Run(ctx, atATime, scored(play))
	fmt.Printf("%d games were played\n", played)
	if err != nil && ctx.Err() == nil {
		log.Fatalf("the agent stopped: %v", err)
	}
}
