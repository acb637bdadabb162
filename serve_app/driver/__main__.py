from serve_app.driver.command import main

if __name__ == "__main__":
    main()
